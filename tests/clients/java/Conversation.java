// What a program with RabbitMQ's Java client sees of a broker: a line for each answer, with the class of each value.
//
// Janino compiles it, so that no JDK is needed: no lambdas, and casts in place of generics.

import com.rabbitmq.client.AMQP;
import com.rabbitmq.client.Channel;
import com.rabbitmq.client.ConfirmListener;
import com.rabbitmq.client.Connection;
import com.rabbitmq.client.ConnectionFactory;
import com.rabbitmq.client.DefaultConsumer;
import com.rabbitmq.client.Envelope;
import com.rabbitmq.client.GetResponse;
import com.rabbitmq.client.LongString;
import com.rabbitmq.client.ReturnListener;
import com.rabbitmq.client.RpcClient;
import com.rabbitmq.client.RpcServer;
import com.rabbitmq.client.ShutdownSignalException;
import java.io.IOException;
import java.math.BigDecimal;
import java.util.Arrays;
import java.util.Collections;
import java.util.Date;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;

public class Conversation {
    static final int PATIENCE_S = 30;
    static final BlockingQueue HEARD = new LinkedBlockingQueue();

    public static void main(String[] arguments) throws Exception {
        ConnectionFactory factory = new ConnectionFactory();
        factory.setUri(arguments[0]);
        Connection connection = factory.newConnection();
        try {
            confirms(connection.createChannel());
            refusedByAQueue(connection.createChannel());
            deaths(connection.createChannel());
            deliveryCounts(connection.createChannel());
            headers(connection.createChannel());
            requests(connection);
            cancelled(connection.createChannel());
            errors(connection);
        } finally {
            connection.close();
        }
        System.exit(0); // threads of the client may linger
    }

    static void confirms(Channel channel) throws Exception {
        listen(channel);
        channel.confirmSelect();
        String queue = channel.queueDeclare().getQueue();
        say("named by the server", queue.startsWith("amq.gen-") + "");
        channel.basicPublish("", queue, true, null, "routed".getBytes());
        hear();
        channel.basicPublish("", "java-nowhere", true, null, "unroutable".getBytes());
        hear();
        hear();
        say("waitForConfirms", channel.waitForConfirms(1000L * PATIENCE_S) + "");
        say("messageCount", channel.messageCount(queue) + "");
        say("purge", channel.queuePurge(queue).getMessageCount() + "");
        channel.close();
    }

    static void refusedByAQueue(Channel channel) throws Exception {
        listen(channel);
        channel.confirmSelect();
        Map arguments = new HashMap();
        arguments.put("x-max-length", Integer.valueOf(0));
        arguments.put("x-overflow", "reject-publish");
        String queue = channel.queueDeclare("", false, true, true, arguments).getQueue();
        channel.basicPublish("", queue, null, "too many".getBytes());
        hear();
        channel.close();
    }

    static void deaths(Channel channel) throws Exception {
        String last = channel.queueDeclare("java-last", false, true, true, null).getQueue();
        Map arguments = new HashMap();
        arguments.put("x-dead-letter-exchange", "");
        arguments.put("x-dead-letter-routing-key", last);
        arguments.put("x-message-ttl", Integer.valueOf(0));
        channel.queueDeclare("java-first", false, true, true, arguments);
        AMQP.BasicProperties properties = null;
        for (int time = 1; time <= 3; time++) {
            channel.basicPublish("", "java-first", properties, "dies".getBytes());
            GetResponse response = get(channel, last, true);
            properties = response.getProps();
            say("death " + time, show(properties.getHeaders()));
            List deaths = (List) properties.getHeaders().get("x-death");
            long count = ((Long) ((Map) deaths.get(0)).get("count")).longValue();
            say("count", count + "");
        }
        channel.close();
    }

    static void deliveryCounts(Channel channel) throws Exception {
        Map arguments = new HashMap();
        arguments.put("x-queue-type", "quorum");
        arguments.put("x-delivery-limit", Integer.valueOf(5));
        channel.queueDeclare("java-quorum", true, false, false, arguments);
        channel.confirmSelect();
        channel.basicPublish("", "java-quorum", null, "again".getBytes());
        channel.waitForConfirmsOrDie(1000L * PATIENCE_S);
        for (int time = 1; time <= 3; time++) {
            GetResponse response = get(channel, "java-quorum", false);
            Envelope envelope = response.getEnvelope();
            say("quorum", envelope.isRedeliver() + " " + show(response.getProps().getHeaders()));
            channel.basicNack(envelope.getDeliveryTag(), false, true);
        }
        channel.queueDelete("java-quorum"); // RabbitMQ's count of its messages is some seconds old
        channel.close();
    }

    static void headers(Channel channel) throws Exception {
        Map headers = new HashMap();
        headers.put("boolean", Boolean.TRUE);
        headers.put("byte", Byte.valueOf((byte) -1));
        headers.put("short", Short.valueOf((short) -2));
        headers.put("int", Integer.valueOf(-3));
        headers.put("long", Long.valueOf(-4));
        headers.put("float", Float.valueOf(1.5f));
        headers.put("double", Double.valueOf(2.5));
        headers.put("decimal", new BigDecimal("12.34"));
        headers.put("text", "é");
        headers.put("bytes", new byte[] {0, -1});
        headers.put("date", new Date(1000000000000L));
        headers.put("list", Arrays.asList(new Object[] {Long.valueOf(1), "two"}));
        headers.put("table", Collections.singletonMap("in", Integer.valueOf(1)));
        headers.put("null", null);
        AMQP.BasicProperties.Builder builder = new AMQP.BasicProperties.Builder();
        builder.headers(headers).contentType("text/plain").deliveryMode(Integer.valueOf(2));
        builder.priority(Integer.valueOf(3)).expiration("60000").timestamp(new Date(2000000000000L));
        String queue = channel.queueDeclare().getQueue();
        channel.basicPublish("", queue, builder.build(), new byte[300000]);
        GetResponse response = get(channel, queue, true);
        AMQP.BasicProperties properties = response.getProps();
        say("headers", show(properties.getHeaders()));
        say("properties", properties.getContentType() + " " + properties.getDeliveryMode() + " "
            + properties.getPriority() + " " + properties.getExpiration() + " "
            + properties.getTimestamp().getTime());
        say("size", response.getBody().length + "");
        channel.close();
    }

    static void requests(Connection connection) throws Exception {
        final Channel serving = connection.createChannel();
        String queue = serving.queueDeclare().getQueue();
        final RpcServer server = new RpcServer(serving, queue) {
            public byte[] handleCall(
                AMQP.BasicProperties asked, byte[] request, AMQP.BasicProperties replied
            ) {
                say("reply-to", asked.getReplyTo().startsWith("amq.rabbitmq.reply-to.") + "");
                return ("answer to " + new String(request)).getBytes();
            }
        };
        Thread thread = new Thread() {
            public void run() {
                try {
                    server.mainloop();
                } catch (Exception ended) { // with its channel
                }
            }
        };
        thread.setDaemon(true);
        thread.start();
        Channel channel = connection.createChannel();
        RpcClient client = new RpcClient(channel, "", queue, 1000 * PATIENCE_S);
        for (int number = 1; number <= 3; number++) {
            say("reply", client.stringCall("request " + number));
        }
        client.close();
        channel.close();
        serving.close();
    }

    static void cancelled(Channel channel) throws Exception {
        String queue = channel.queueDeclare().getQueue();
        channel.basicConsume(queue, false, "me", new DefaultConsumer(channel) {
            public void handleDelivery(
                String tag, Envelope envelope, AMQP.BasicProperties properties, byte[] body
            ) throws IOException {
                HEARD.add("delivered " + envelope.getDeliveryTag() + " " + new String(body));
                getChannel().basicAck(envelope.getDeliveryTag(), false);
            }

            public void handleCancel(String tag) {
                HEARD.add("cancelled " + tag);
            }
        });
        say("consumers", channel.consumerCount(queue) + "");
        channel.basicPublish("", queue, null, "to me".getBytes());
        hear();
        channel.queueDelete(queue);
        hear();
        channel.close();
    }

    static void errors(Connection connection) throws Exception {
        Channel channel = connection.createChannel();
        try {
            channel.queueDeclarePassive("java-nowhere");
        } catch (IOException error) {
            say("passive", reason(error));
        }
        channel = connection.createChannel();
        channel.queueDeclare("java-once", false, true, true, null);
        try {
            channel.queueDeclare("java-once", true, true, true, null);
        } catch (IOException error) {
            say("again", reason(error));
        }
        channel = connection.createChannel();
        channel.confirmSelect();
        channel.basicPublish("java-no-exchange", "", null, "lost".getBytes());
        try {
            channel.waitForConfirmsOrDie(1000L * PATIENCE_S);
        } catch (ShutdownSignalException error) {
            say("publish", error.getClass().getName() + " " + close(error));
        }
        channel = connection.createChannel();
        try {
            channel.exchangeDeclare("amq.mine", "direct");
        } catch (IOException error) {
            say("reserved", reason(error));
        }
    }

    // ---------------------------------------------------------------- what is heard, and said

    static void listen(Channel channel) {
        channel.addReturnListener(new ReturnListener() {
            public void handleReturn(
                int code, String text, String exchange, String key, AMQP.BasicProperties properties, byte[] body
            ) {
                HEARD.add("returned " + code + " " + text + " " + key + " " + new String(body));
            }
        });
        channel.addConfirmListener(new ConfirmListener() {
            public void handleAck(long tag, boolean multiple) {
                HEARD.add("ack " + tag);
            }

            public void handleNack(long tag, boolean multiple) {
                HEARD.add("nack " + tag);
            }
        });
    }

    static void hear() throws Exception {
        say("heard", (String) HEARD.poll(PATIENCE_S, TimeUnit.SECONDS));
    }

    static GetResponse get(Channel channel, String queue, boolean acknowledged) throws Exception {
        for (int time = 0; time < PATIENCE_S * 100; time++) {
            GetResponse response = channel.basicGet(queue, acknowledged);
            if (response != null) {
                return response;
            }
            Thread.sleep(10);
        }
        throw new IllegalStateException("nothing came to " + queue);
    }

    static String reason(IOException error) {
        return close((ShutdownSignalException) error.getCause());
    }

    static String close(ShutdownSignalException error) {
        AMQP.Channel.Close close = (AMQP.Channel.Close) error.getReason();
        return close.getReplyCode() + " " + close.getReplyText() + " " + close.getClassId() + "." + close.getMethodId();
    }

    static String show(Object value) {
        if (value == null) {
            return "null";
        }
        if (value instanceof Map) {
            StringBuilder shown = new StringBuilder("{");
            for (Object one : new TreeMap((Map) value).entrySet()) {
                Map.Entry entry = (Map.Entry) one;
                shown.append(entry.getKey()).append("=");
                shown.append(entry.getKey().equals("time") ? kind(entry.getValue()) : show(entry.getValue()));
                shown.append(" ");
            }
            return shown.append("}").toString();
        }
        if (value instanceof List) {
            StringBuilder shown = new StringBuilder("[");
            for (Object one : (List) value) {
                shown.append(show(one)).append(" ");
            }
            return shown.append("]").toString();
        }
        Object inside = value;
        if (value instanceof LongString) {
            inside = value.toString(); // as UTF-8
        } else if (value instanceof byte[]) {
            inside = Arrays.toString((byte[]) value);
        } else if (value instanceof Date) {
            inside = Long.valueOf(((Date) value).getTime());
        }
        return kind(value) + " " + inside;
    }

    static String kind(Object value) {
        return value.getClass().getSimpleName();
    }

    static synchronized void say(String what, String told) {
        System.out.println(what + ": " + told);
    }
}
